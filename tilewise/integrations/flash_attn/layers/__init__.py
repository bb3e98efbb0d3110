"""The supported part of flash_attn.layers: the rotary embedding."""

"""What of flash_attn.layers is here: the rotary embedding."""

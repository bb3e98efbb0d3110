"""GGUF files, llama.cpp's, as checkpoints: what they hold under Hugging Face's names."""

"""An OpenAI-compatible server over AsyncLLM: it knows requests and text, no cache and no tensor."""

"""The OpenAI-compatible server: requests and replies in JSON over HTTP. Knows text and links; never a device."""

"""Text on both sides of the engine: prompts to token ids, token ids back to text. Never sees a logit or a device."""

"""How the next token is chosen. Knows logits and parameters; not where logits come from nor what an id spells."""

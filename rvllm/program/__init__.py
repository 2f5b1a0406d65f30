"""What a model function records: tensors, ops, programs; and the passes over them. Knows no device and no model."""

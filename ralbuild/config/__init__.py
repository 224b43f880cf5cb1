"""`ral-config.yaml`: strict loading, every problem at once with file:line:column, JSON Schema."""

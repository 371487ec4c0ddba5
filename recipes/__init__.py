"""The recipes: one YAML each, with the modules and data they use."""

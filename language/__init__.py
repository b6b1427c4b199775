"""Language models: README.md is about the scripts of this folder."""

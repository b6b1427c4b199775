"""Object detection: README.md is about the scripts of this folder."""

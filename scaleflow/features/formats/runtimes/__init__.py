"""The export formats. Each module has a converter and a runtime."""

"""The byte stream of a model: its layout, copies into and out of it, and their fingerprints."""

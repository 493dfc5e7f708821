"""The wire format: messages, their encoding, and errors as problem documents. Imports no torch."""

"""What goes over the wire: messages, their encoding, and errors as problem documents. No torch."""

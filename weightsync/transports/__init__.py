"""The control plane: how messages reach a receiver. Bytes of weights never travel here."""

"""Where weights come from and go to, and how they are cut, copied and fingerprinted."""

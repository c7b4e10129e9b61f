"""How a scorer of each kind is made: one file a kind, ``registry`` names them."""

"""Model definitions and the one table that maps checkpoint names to parameters."""

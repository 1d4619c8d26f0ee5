"""Names that OpenRLHF imports."""

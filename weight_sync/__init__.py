"""Moving weights from a trainer into live engines. torch only: a trainer can use it alone."""

"""Training draft heads: EAGLE-3 heads and MTP layers."""

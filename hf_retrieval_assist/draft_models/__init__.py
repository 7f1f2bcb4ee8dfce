"""Models that draft: EAGLE heads, MTP layers, DFlash models, early exit, smaller models."""

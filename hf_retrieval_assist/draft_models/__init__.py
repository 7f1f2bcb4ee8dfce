"""Models that draft: EAGLE heads, MTP layers, DFlash models, smaller models."""

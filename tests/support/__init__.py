"""What tests share: tiny models, oracles, stand-ins for devices, and ways to compare."""

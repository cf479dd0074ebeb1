"""Jobs of several ranks, under every launcher."""

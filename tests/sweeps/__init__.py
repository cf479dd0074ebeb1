"""Everything that can go wrong, wherever it can: crashes, failing calls, events, flipped bits, hostile files."""

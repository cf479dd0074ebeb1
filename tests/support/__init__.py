"""What the tests are made of, and the tests of that."""

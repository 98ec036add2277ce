"""What we test with, shipped so that users test with it too."""

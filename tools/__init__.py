"""What writes pages of the documentation: by trying what they say, or from where it is said. No part of dpbench."""

"""What every other room uses: the compiled library, and how operators written in Python are registered and launched."""

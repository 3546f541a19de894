"""Folders of pictures, and the tables beside them."""

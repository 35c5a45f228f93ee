"""The engine core and its clients. It knows runners only through their protocol."""

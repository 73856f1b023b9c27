"""How fast a private step is, against the fastest step without privacy and against other libraries; see `__main__`."""

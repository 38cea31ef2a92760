"""Methods of other papers, one file each beside mars.py, with their toys."""

"""Sparse attention on CDNA3 and CDNA4 in Gluon."""

"""Device code of a paged cache: addresses and loads of its pages, and the fused append."""

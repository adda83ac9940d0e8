"""Non-parametric memory: passage stores and the indexes that search them."""

"""Questions, passages and text: readers, formats and the input pipeline."""

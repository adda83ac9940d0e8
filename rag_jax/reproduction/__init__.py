"""The paper's tables and figures: what is trained and measured for each, and the report on it."""

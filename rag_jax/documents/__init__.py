"""From files as people have them (PDF, DOCX, HTML, Markdown, ...) to passages that cite them."""

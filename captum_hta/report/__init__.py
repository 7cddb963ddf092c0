"""Pages that show a study, or several."""

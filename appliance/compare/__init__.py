"""One recipe under several settings and seeds: the runs, what they came to, and how sure that is."""

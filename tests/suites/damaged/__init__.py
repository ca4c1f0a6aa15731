"""Files of every format that is read, made to be damaged: what each is read by, and what may become of it."""

"""What guessed tokens save: the same loads with and without them, in turns."""

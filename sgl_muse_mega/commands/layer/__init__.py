"""`sgl-muse-mega bench layer`: arms in processes of their own, their turns, and what is made of the times."""

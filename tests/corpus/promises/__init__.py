"""Jobs that keep state in odd places, draw, couple, or need a trial: what is promised must hold."""

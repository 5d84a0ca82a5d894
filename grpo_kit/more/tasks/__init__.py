"""Further tasks; `kit.tasks` names them, too."""

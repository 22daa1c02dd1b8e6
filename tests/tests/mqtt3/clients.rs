checks! {}
use crate::scene::checks;

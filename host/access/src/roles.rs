//! What an operator may do through the admin API. A role has all rights of the roles before it.

use std::fmt;
use std::str::FromStr;

/// The role of an operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    /// Read keys, metrics, usage, clients, policies, log lines and history.
    Read,
    /// Also change keys, disconnect clients, and change which loaded policy answers, and which host
    /// leads.
    Operate,
    /// Also bring in new policies.
    Ship,
}

/// The name of a role is unknown.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{}` is no role: roles are read, operate and ship", .0.escape_debug())]
pub struct RoleError(String);

impl Role {
    /// All roles.
    pub const ALL: [Self; 3] = [Self::Read, Self::Operate, Self::Ship];

    /// The name of the role in the users file.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Operate => "operate",
            Self::Ship => "ship",
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Role {
    type Err = RoleError;

    fn from_str(name: &str) -> Result<Self, RoleError> {
        let found = Self::ALL.into_iter().find(|role| role.name() == name);
        found.ok_or_else(|| RoleError(name.to_owned()))
    }
}

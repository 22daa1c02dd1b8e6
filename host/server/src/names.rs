//! Numbers of policies and commands, so that waiting requests need not hold references. Both are
//! limited in number, because each command has time series of its own.

use statehouse_config::limits;
use statehouse_core::policy::Policy;
use statehouse_core::store::Transaction;

pub(super) struct Names {
    policies: Vec<KnownPolicy>,
    /// The place of the policy of the last request.
    last: usize,
    /// The first one is that of all further commands, and of requests without one.
    commands: Vec<Box<str>>,
}

struct KnownPolicy {
    digest: [u8; 32],
    tag: Box<str>,
    /// The numbers of its commands.
    commands: Vec<u16>,
}

impl Default for Names {
    fn default() -> Self {
        Self {
            policies: Vec::new(),
            last: 0,
            commands: vec!["other".into()],
        }
    }
}

impl Names {
    /// The numbers of a policy and its command. A policy beyond the limit, or none, has the number
    /// behind the last.
    pub(super) fn numbers(
        &mut self,
        policy: Option<&Policy<Transaction>>,
        command: Option<u16>,
    ) -> (u16, u16) {
        let Some(policy) = policy else {
            return (u16::MAX, 0);
        };
        let digest = policy.digest.as_bytes();
        if self
            .policies
            .get(self.last)
            .is_none_or(|it| it.digest != *digest)
        {
            let found = self.policies.iter().position(|it| it.digest == *digest);
            match found.or_else(|| self.know(policy)) {
                Some(place) => self.last = place,
                None => return (u16::MAX, 0),
            }
        }
        let commands = &self.policies[self.last].commands;
        let number = command.and_then(|it| commands.get(usize::from(it)));
        // Cannot truncate: there are few policies.
        (self.last as u16, number.copied().unwrap_or(0))
    }

    fn know(&mut self, policy: &Policy<Transaction>) -> Option<usize> {
        if self.policies.len() >= limits::METRIC_POLICIES_MAX {
            return None;
        }
        let commands = policy.commands.iter().map(|it| self.command_number(it));
        let commands = commands.collect();
        self.policies.push(KnownPolicy {
            digest: *policy.digest.as_bytes(),
            tag: policy.tag.as_str().into(),
            commands,
        });
        Some(self.policies.len() - 1)
    }

    /// Policies choose the names, and each is a set of time series.
    fn command_number(&mut self, name: &str) -> u16 {
        let found = self.commands.iter().position(|it| **it == *name);
        let number = found.unwrap_or_else(|| {
            if self.commands.len() > limits::METRIC_COMMANDS_MAX {
                return 0;
            }
            self.commands.push(name.into());
            self.commands.len() - 1
        });
        // Cannot truncate: there are few commands.
        number as u16
    }

    pub(super) fn commands(&self) -> impl Iterator<Item = &str> {
        self.commands.iter().map(|it| &**it)
    }

    /// The name of a command; none if it has no number of its own.
    pub(super) fn command(&self, number: u16) -> Option<&str> {
        let name = self.commands.get(usize::from(number))?;
        (number > 0).then_some(name)
    }

    /// The name and digest of a policy.
    pub(super) fn policy(&self, number: u16) -> Option<&str> {
        self.policies.get(usize::from(number)).map(|it| &*it.tag)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_beyond_the_limit_are_other() {
        let mut names = Names::default();
        let numbers = (0..1_000).map(|it| names.command_number(&it.to_string()));
        let distinct: std::collections::BTreeSet<u16> = numbers.collect();
        assert_eq!(distinct.len(), limits::METRIC_COMMANDS_MAX + 1);
        assert_eq!(
            (names.command_number("other"), names.command_number("0")),
            (0, 1)
        );
        assert_eq!((names.command(0), names.command(1)), (None, Some("0")));
    }
}

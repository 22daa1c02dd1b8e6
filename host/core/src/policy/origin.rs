//! How policies came to the store: when, on which way and by whom each was loaded and got its
//! present role.
//!
//! The origins are a part of the assignment, so they are recorded and recovered with it. They must
//! never affect a response.

use serde::{Deserialize, Serialize};

use super::assignment::Assignment;
use super::digest::Digest;
use crate::limits;

/// The origin of one policy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Origin {
    /// The policy.
    pub policy: Digest,
    /// How it was loaded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loaded: Option<Act>,
    /// The id of the trusted key that signed its file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub signed_by: Option<String>,
    /// How it got the last of its roles.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub assigned: Option<Act>,
}

/// A change of the assignment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Act {
    /// The time in milliseconds.
    pub at_ms: u64,
    /// The author.
    #[serde(flatten)]
    pub by: Actor,
}

/// The author of a change, as far as the store knows it. Later versions may add fields.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Actor {
    /// The way on which the change arrived: `admin`, `directory`, `order`, `setting` or `guard`.
    pub path: String,
    /// The file in the drop directory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
    /// The client that published the order.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client: Option<String>,
    /// The user of that client, or at the admin API.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// The serial number of the order.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub serial: Option<u64>,
    /// The id of the trusted key that signed the order.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
}

impl Actor {
    fn of(path: &str) -> Self {
        Self {
            path: path.to_owned(),
            ..Self::default()
        }
    }

    /// An operator at the admin API, with this user name if there is one.
    pub fn admin(user: Option<&str>) -> Self {
        Self {
            user: user.map(cut),
            ..Self::of("admin")
        }
    }

    /// The writer of this file in the drop directory.
    pub fn directory(file: &str) -> Self {
        Self {
            file: Some(cut(file)),
            ..Self::of("directory")
        }
    }

    /// The client that published the order with this serial number, which this key signed.
    pub fn order(client: &str, user: Option<&str>, serial: u64, key: String) -> Self {
        Self {
            client: Some(cut(client)),
            user: user.map(cut),
            serial: Some(serial),
            key: Some(key),
            ..Self::of("order")
        }
    }

    /// The setting `policy` at a start.
    pub fn setting() -> Self {
        Self::of("setting")
    }

    /// The guard of this store.
    pub fn guard() -> Self {
        Self::of("guard")
    }
}

/// The beginning of a name that a client or an operator chose.
fn cut(name: &str) -> String {
    name[..name.floor_char_boundary(limits::ORIGIN_NAME_BYTES_MAX)].to_owned()
}

impl Assignment {
    /// The same, with the origins of the policies that `act` loaded or gave a role, since the
    /// assignment `before`. `signed_by` is the key of a file that was loaded.
    pub fn noted(mut self, before: &Self, act: &Act, signed_by: Option<&str>) -> Self {
        let all = self.all();
        self.origins.retain(|it| all.contains(&it.policy));
        for policy in all {
            let is_loaded = self.loaded.contains(&policy) && !before.loaded.contains(&policy);
            let is_assigned = self.has_new_role(before, policy);
            if !is_loaded && !is_assigned {
                continue;
            }
            let origin = self.origin_mut(policy);
            if is_loaded {
                origin.loaded = Some(act.clone());
                origin.signed_by = signed_by.map(str::to_owned);
            }
            if is_assigned {
                origin.assigned = Some(act.clone());
            }
        }
        self
    }

    /// The origin of a policy, if it is known.
    pub fn origin(&self, policy: Digest) -> Option<&Origin> {
        self.origins.iter().find(|it| it.policy == policy)
    }

    /// The policies that answer requests or are compared as they did not in the assignment
    /// `before`.
    pub fn newly_assigned(&self, before: &Self) -> Vec<Digest> {
        let all = self.all().into_iter();
        all.filter(|it| self.has_new_role(before, *it)).collect()
    }

    fn origin_mut(&mut self, policy: Digest) -> &mut Origin {
        let known = self.origins.iter().position(|it| it.policy == policy);
        let at = known.unwrap_or_else(|| {
            self.origins.push(Origin {
                policy,
                loaded: None,
                signed_by: None,
                assigned: None,
            });
            self.origins.len() - 1
        });
        &mut self.origins[at]
    }

    /// Whether a policy answers requests or is compared as it did not in the assignment `before`.
    fn has_new_role(&self, before: &Self, policy: Digest) -> bool {
        let is_shadow = self.shadow.is_some_and(|it| it.policy == policy);
        let is_canary = self.canary.as_ref().is_some_and(|it| it.policy == policy);
        let mut routes = self.routes.iter().filter(|it| it.policy == policy);
        (self.active == policy && before.active != policy)
            || (is_shadow && self.shadow != before.shadow)
            || (is_canary && self.canary != before.canary)
            || routes.any(|it| !before.routes.contains(it))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::{Canary, CanaryRule};

    fn digest(name: &str) -> Digest {
        Digest::of(name.as_bytes())
    }

    fn act(at_ms: u64) -> Act {
        Act {
            at_ms,
            by: Actor::admin(None),
        }
    }

    /// When a policy was loaded and assigned.
    fn times(assignment: &Assignment, policy: Digest) -> [Option<u64>; 2] {
        let origin = assignment.origin(policy);
        let at = |act: Option<&Act>| act.map(|it| it.at_ms);
        [
            at(origin.and_then(|it| it.loaded.as_ref())),
            at(origin.and_then(|it| it.assigned.as_ref())),
        ]
    }

    #[test]
    fn only_policies_with_new_roles_are_noted() {
        let (built_in, one, two) = (digest("built in"), digest("one"), digest("two"));
        let start = Assignment::of(built_in);
        let mut last = start.load(one).unwrap().noted(&start, &act(1), Some("k"));
        assert_eq!(last.origin(one).unwrap().signed_by.as_deref(), Some("k"));
        let mut step = |make: &dyn Fn(&Assignment) -> Assignment, at_ms| {
            let next = make(&last);
            let assigned = next.newly_assigned(&last);
            last = next.noted(&last, &act(at_ms), None);
            let noted = |it: &Digest| times(&last, *it)[1] == Some(at_ms);
            assert!(assigned.iter().all(noted), "{assigned:?}");
            [built_in, one, two].map(|it| times(&last, it))
        };
        let unknown = [None, None];
        step(&|it| it.load(two).unwrap(), 2);
        let all = step(&|it| it.promote(one).unwrap(), 3);
        assert_eq!(all, [unknown, [Some(1), Some(3)], [Some(2), None]]);
        let canary = |percent| Canary {
            policy: two,
            rule: CanaryRule::Percent(percent),
        };
        step(&|it| it.canary(Some(canary(5))).unwrap(), 4);
        let all = step(&|it| it.canary(Some(canary(6))).unwrap(), 5);
        assert_eq!(all, [unknown, [Some(1), Some(3)], [Some(2), Some(5)]]);
        step(&|it| it.canary(None).unwrap(), 6);
        step(&|it| it.route(b"k", Some(two)).unwrap(), 7);
        let all = step(&|it| it.rollback().unwrap(), 8);
        let rolled_back = [[None, Some(8)], [Some(1), Some(3)], [Some(2), Some(7)]];
        assert_eq!(all, rolled_back);
        assert_eq!(step(&|it| it.promote(built_in).unwrap(), 9), rolled_back);
        let all = step(&|it| it.unload(one).unwrap(), 10);
        assert_eq!(all[1], unknown);
        assert!(step(&|it| it.without(two), 11)[2] == unknown && last.origins.len() == 1);
    }

    #[test]
    fn origins_are_read_back_and_names_are_bounded() {
        let long = "ä".repeat(limits::ORIGIN_NAME_BYTES_MAX);
        let by = Actor::order(&long, Some("anna"), 7, "abcd".into());
        let client = by.client.clone().unwrap();
        assert!(client.len() <= limits::ORIGIN_NAME_BYTES_MAX && long.starts_with(&client));
        let start = Assignment::of(digest("built in"));
        let next = start.load(digest("one")).unwrap();
        let next = next.noted(&start, &Act { at_ms: 5, by }, None);
        let json = serde_json::to_string(&next).unwrap();
        assert_eq!(serde_json::from_str::<Assignment>(&json).unwrap(), next);
        // Older versions know no origins, and later ones may know more of them.
        let old = serde_json::to_string(&start).unwrap();
        assert!(!old.contains("origins"), "{old}");
        let later = json.replace(r#""serial":7"#, r#""serial":7,"address":"x""#);
        assert_ne!(later, json);
        assert_eq!(serde_json::from_str::<Assignment>(&later).unwrap(), next);
    }
}

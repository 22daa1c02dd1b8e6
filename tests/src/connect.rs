//! Encodes the CONNECT packet of MQTT 5 and of MQTT 3.1.1.

use crate::{
    packet::{Publish, packet},
    property::{self, Property, sized},
};

/// A CONNECT. The default is a clean session that ends with the connection, without keep alive.
#[derive(Clone, Debug)]
pub struct Connect {
    /// Client id. If it is empty, the server assigns one.
    pub client_id: String,
    pub clean_start: bool,
    /// Keep Alive. 0 turns it off.
    pub keep_alive_s: u16,
    /// In the order of the wire.
    pub properties: Vec<Property>,
    pub will: Option<Will>,
    pub user_name: Option<String>,
    pub password: Option<Vec<u8>>,
}

/// A last will. Its QoS and RETAIN are those of the message.
#[derive(Clone, Debug)]
pub struct Will {
    /// Topic, payload, QoS, retain and properties.
    pub message: Publish,
    /// Will Delay Interval. If it is 0, the packet has no such property.
    pub delay_s: u32,
}

impl Connect {
    /// Starts a clean session.
    pub fn new(client_id: &str) -> Connect {
        Connect {
            client_id: client_id.into(),
            clean_start: true,
            keep_alive_s: 0,
            properties: Vec::new(),
            will: None,
            user_name: None,
            password: None,
        }
    }

    /// Resumes the session, which outlives the connection by `session_expiry_s`.
    #[must_use]
    pub fn resume(client_id: &str, session_expiry_s: u32) -> Connect {
        let mut connect = Connect::new(client_id);
        connect.clean_start = false;
        connect.with(Property::SessionExpiry(session_expiry_s))
    }

    #[must_use]
    pub fn with(mut self, property: Property) -> Connect {
        self.properties.push(property);
        self
    }

    #[must_use]
    pub fn login(mut self, user: &str, password: impl Into<Vec<u8>>) -> Connect {
        self.user_name = Some(user.into());
        self.password = Some(password.into());
        self
    }

    #[must_use]
    pub fn will(mut self, message: Publish, delay_s: u32) -> Connect {
        self.will = Some(Will { message, delay_s });
        self
    }

    pub fn bytes(&self) -> Vec<u8> {
        self.encode(5)
    }

    /// The bytes of the wire in MQTT 3.1.1, which has no properties.
    pub fn bytes3(&self) -> Vec<u8> {
        self.encode(4)
    }

    fn encode(&self, version: u8) -> Vec<u8> {
        let section = |properties: &[Property]| match version {
            5 => property::write(properties),
            _ => {
                assert!(properties.is_empty(), "MQTT 3.1.1 has no {properties:?}");
                Vec::new()
            }
        };
        let mut flags = u8::from(self.clean_start) << 1;
        let mut payload = sized(self.client_id.as_bytes());
        if let Some(will) = &self.will {
            let message = &will.message;
            flags |= 4 | message.qos << 3 | u8::from(message.retain) << 5;
            let mut properties = message.properties.clone();
            if will.delay_s > 0 {
                properties.insert(0, Property::WillDelay(will.delay_s));
            }
            payload.extend(section(&properties));
            payload.extend(sized(message.topic.as_bytes()));
            payload.extend(sized(&message.payload));
        }
        if let Some(user) = &self.user_name {
            flags |= 0x80;
            payload.extend(sized(user.as_bytes()));
        }
        if let Some(password) = &self.password {
            flags |= 0x40;
            payload.extend(sized(password));
        }
        let mut body = sized(b"MQTT");
        body.extend([version, flags]);
        body.extend(self.keep_alive_s.to_be_bytes());
        body.extend(section(&self.properties));
        body.extend(payload);
        packet(0x10, &body)
    }
}

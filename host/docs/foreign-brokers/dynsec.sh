#!/usr/bin/env bash
# Users and roles for a Statehouse and one client in Mosquitto's dynamic security: what statehouse.acl is to files.
#   dynsec.sh ADMIN_PASSWORD STORE_PASSWORD CLIENT CLIENT_PASSWORD [HOST [PORT]]
set -euo pipefail
admin=$1 store=$2 client=$3 password=$4 host=${5:-127.0.0.1} port=${6:-1883}
ctrl() { mosquitto_ctrl -h "$host" -p "$port" -u admin -P "$admin" dynsec "$@"; }

# Such a client would read messages to other clients.
case $client in
    statestore | statestore/* | *[+#]*)
        echo "dynsec.sh: no client may be named $client: its topics would be those of others" >&2
        exit 2
        ;;
esac

ID=statestore/v1/FA9AE35F-2F64-47CD-9BFF-08E2B32A0FE8
hex=$(printf %s "$client" | od -An -v -tx1 | tr -d ' \n' | tr a-f A-F)

ctrl createRole statehouse
ctrl addRoleACL statehouse subscribeLiteral "$ID/command/invoke" allow
ctrl addRoleACL statehouse subscribeLiteral '$services/statestore/_any_/command/invoke/request' allow
ctrl addRoleACL statehouse publishClientSend 'clients/#' allow
ctrl addRoleACL statehouse publishClientSend 'statehouse/v1/attached/+' allow
ctrl addRoleACL statehouse subscribePattern 'statehouse/v1/attached/+' allow
ctrl addRoleACL statehouse subscribeLiteral '$SYS/broker/version' allow
ctrl addRoleACL statehouse subscribeLiteral '$SYS/broker/log/N' allow
ctrl createClient statehouse -p "$store"
ctrl addClientRole statehouse statehouse

# A role for each client: version 2.0 puts no client id into the topics of a role. `-c` binds the client id to the user.
ctrl createRole "store-client-$client"
ctrl addRoleACL "store-client-$client" publishClientSend "$ID/command/invoke" allow
ctrl addRoleACL "store-client-$client" publishClientSend '$services/statestore/_any_/command/invoke/request' allow
# Responses: the id as written (Rust, .NET) and in hexadecimal (Go). Notifications: in hexadecimal; .NET also subscribes to the id
# as written, where nothing is published.
ctrl addRoleACL "store-client-$client" subscribePattern "clients/$client/#" allow
ctrl addRoleACL "store-client-$client" subscribePattern "clients/$hex/#" allow
ctrl addRoleACL "store-client-$client" subscribePattern "clients/$ID/$hex/command/notify/+" allow
ctrl addRoleACL "store-client-$client" subscribeLiteral "clients/$ID/$client/command/notify" allow
ctrl createClient "$client" -p "$password" -c "$client"
ctrl addClientRole "$client" "store-client-$client"

/* The network of a virtual machine, through rtnetlink(7). */
#include <arpa/inet.h>
#include <linux/neighbour.h>
#include <linux/rtnetlink.h>
#include <net/if.h>
#include <stdio.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "loop.h"
#include "vm.h"

#define INTERFACE_WAIT_US 60000000
#define INTERFACE_POLL_US 20000

struct request {
    struct nlmsghdr head;
    uint8_t body[256];
};

static int netlink_open(void)
{
    int fd = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_ROUTE);
    return fd < 0 ? -errno : fd;
}

static struct vm_network present; /* what we have set */

static struct request request_of(uint16_t type, uint16_t flags, const void *fixed, size_t n)
{
    struct request request = {
        .head = { .nlmsg_len = (uint32_t)(NLMSG_HDRLEN + NLMSG_ALIGN(n)), .nlmsg_type = type,
                  .nlmsg_flags = (uint16_t)(NLM_F_REQUEST | NLM_F_ACK | flags) },
    };
    memcpy(request.body, fixed, n);
    return request;
}

static void put(struct request *request, uint16_t type, const void *value, size_t n)
{
    struct rtattr head = { .rta_len = (uint16_t)RTA_LENGTH(n), .rta_type = type };
    uint8_t *at = (uint8_t *)request + request->head.nlmsg_len;
    memcpy(at, &head, sizeof head);
    memcpy(at + RTA_LENGTH(0), value, n);
    request->head.nlmsg_len += (uint32_t)RTA_SPACE(n);
}

static size_t address_bytes(const struct vm_address *address)
{
    return address->family == AF_INET6 ? 16 : 4;
}

/* Send, and wait for the kernel's word on it. */
static int ask(int fd, const struct request *request)
{
    struct {
        struct nlmsghdr head;
        struct nlmsgerr error;
        uint8_t more[512];
    } answer;
    if (send(fd, request, request->head.nlmsg_len, 0) < 0)
        return -errno;
    ssize_t n = recv(fd, &answer, sizeof answer, 0);
    if (n < 0)
        return -errno;
    if ((size_t)n < NLMSG_LENGTH(sizeof answer.error) || answer.head.nlmsg_type != NLMSG_ERROR)
        return -EPROTO;
    return answer.error.error;
}

static int link_up(int fd, unsigned index)
{
    struct ifinfomsg link = { .ifi_index = (int)index, .ifi_flags = IFF_UP, .ifi_change = IFF_UP };
    struct request request = request_of(RTM_NEWLINK, 0, &link, sizeof link);
    return ask(fd, &request);
}

static int set_mtu(int fd, unsigned index, unsigned mtu)
{
    struct ifinfomsg link = { .ifi_index = (int)index };
    struct request request = request_of(RTM_NEWLINK, 0, &link, sizeof link);
    put(&request, IFLA_MTU, &mtu, sizeof mtu);
    return ask(fd, &request);
}

/* No detection of duplicates: the address is ours alone, and usable at once. */
static int add_address(int fd, unsigned index, const struct vm_address *address)
{
    struct ifaddrmsg fixed = {
        .ifa_family = (uint8_t)address->family, .ifa_prefixlen = (uint8_t)address->prefix,
        .ifa_flags = address->family == AF_INET6 ? IFA_F_NODAD : 0, .ifa_index = index,
    };
    struct request request =
        request_of(RTM_NEWADDR, NLM_F_CREATE | NLM_F_EXCL, &fixed, sizeof fixed);
    put(&request, IFA_LOCAL, address->bytes, address_bytes(address));
    put(&request, IFA_ADDRESS, address->bytes, address_bytes(address));
    return ask(fd, &request);
}

static int remove_address(int fd, unsigned index, const struct vm_address *address)
{
    struct ifaddrmsg fixed = {
        .ifa_family = (uint8_t)address->family, .ifa_prefixlen = (uint8_t)address->prefix,
        .ifa_index = index,
    };
    struct request request = request_of(RTM_DELADDR, 0, &fixed, sizeof fixed);
    put(&request, IFA_LOCAL, address->bytes, address_bytes(address));
    int error = ask(fd, &request);
    return error == -EADDRNOTAVAIL ? 0 : error; /* root inside was faster */
}

/* On the link even where no address of ours says so: containers' gateways are link-local ones. */
static int add_gateway(int fd, unsigned index, const struct vm_address *gateway)
{
    struct rtmsg fixed = {
        .rtm_family = (uint8_t)gateway->family, .rtm_table = RT_TABLE_MAIN,
        .rtm_protocol = RTPROT_STATIC, .rtm_scope = RT_SCOPE_UNIVERSE, .rtm_type = RTN_UNICAST,
        .rtm_flags = RTNH_F_ONLINK,
    };
    struct request request =
        request_of(RTM_NEWROUTE, NLM_F_CREATE | NLM_F_REPLACE, &fixed, sizeof fixed);
    put(&request, RTA_GATEWAY, gateway->bytes, address_bytes(gateway));
    put(&request, RTA_OIF, &index, sizeof index);
    return ask(fd, &request);
}

/* For good: there is nobody to ask for it. */
static int add_neighbour(int fd, unsigned index, const struct vm_neighbour *neighbour)
{
    const struct vm_address *address = &neighbour->address;
    struct ndmsg fixed = {
        .ndm_family = (uint8_t)address->family, .ndm_ifindex = (int)index,
        .ndm_state = NUD_PERMANENT,
    };
    struct request request =
        request_of(RTM_NEWNEIGH, NLM_F_CREATE | NLM_F_REPLACE, &fixed, sizeof fixed);
    put(&request, NDA_DST, address->bytes, address_bytes(address));
    put(&request, NDA_LLADDR, neighbour->mac, sizeof neighbour->mac);
    return ask(fd, &request);
}

int vm_loopback_up(void)
{
    int fd = netlink_open();
    if (fd < 0)
        return fd;
    int error = link_up(fd, if_nametoindex("lo"));
    close(fd);
    return error;
}

static bool has_mac(int fd, const char *name, const char *wanted)
{
    struct ifreq request = { 0 };
    char text[sizeof "00:00:00:00:00:00"];
    snprintf(request.ifr_name, sizeof request.ifr_name, "%s", name);
    if (ioctl(fd, SIOCGIFHWADDR, &request) < 0)
        return false;
    const uint8_t *mac = (const uint8_t *)request.ifr_hwaddr.sa_data;
    snprintf(text, sizeof text, "%02x:%02x:%02x:%02x:%02x:%02x", mac[0], mac[1], mac[2], mac[3],
             mac[4], mac[5]);
    return strcmp(text, wanted) == 0;
}

/* A system of its own names interfaces as it likes. 0: there is none. */
static unsigned find_interface(const char *wanted)
{
    unsigned index = if_nametoindex(wanted);
    struct if_nameindex *all = index ? NULL : if_nameindex();
    int fd = all ? netlink_open() : -1;
    for (struct if_nameindex *one = all; fd >= 0 && one->if_index && !index; one++)
        if (has_mac(fd, one->if_name, wanted))
            index = one->if_index;
    if (fd >= 0)
        close(fd);
    if (all)
        if_freenameindex(all);
    return index;
}

/* As a service we may begin before its driver was loaded. */
static unsigned await_interface(const char *wanted)
{
    unsigned index;
    for (uint64_t until = now_us() + INTERFACE_WAIT_US;
         !(index = find_interface(wanted)) && vm_service && now_us() < until;)
        usleep(INTERFACE_POLL_US);
    return index;
}

int vm_network_up(const struct vm_network *network)
{
    unsigned index = await_interface(network->interface);
    if (!index)
        return -ENODEV;
    int fd = netlink_open();
    if (fd < 0)
        return fd;
    int error = network->mtu ? set_mtu(fd, index, network->mtu) : 0;
    while (present.n_addresses && !error)
        error = remove_address(fd, index, &present.addresses[--present.n_addresses]);
    if (!error)
        error = link_up(fd, index);
    for (unsigned i = 0; i < network->n_addresses && !error; i++)
        error = add_address(fd, index, &network->addresses[i]);
    for (unsigned i = 0; i < network->n_neighbours && !error; i++)
        error = add_neighbour(fd, index, &network->neighbours[i]);
    for (unsigned i = 0; i < network->n_gateways && !error; i++)
        error = add_gateway(fd, index, &network->gateways[i]);
    present = *network;
    close(fd);
    return error;
}
